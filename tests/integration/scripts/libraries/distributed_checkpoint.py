"""Two ranks that save with torch.distributed.checkpoint into one folder."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Numbers()
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    for step, (x, y) in enumerate(endless(loader), 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            own = f"rank{rank}"
            state = {"model": model.module.state_dict(), own: torch.full((3,), float(step))}
            dcp.save(state, checkpoint_id="checkpoint")
            back = {own: torch.zeros(3)}
            dcp.load(back, checkpoint_id="checkpoint")
            assert back[own].tolist() == [step] * 3
            record(step, f"checkpoint/__{rank}_0.distcp")
        if step == STEPS:
            break
    # Freed last, the model would wait for gloo's thread, which waits for the interpreter.
    del model
    dist.destroy_process_group()


main()
