"""Small DDP trainings on gloo, one for each way to use DDP; what each ends with goes to LOGS/ways.rank{r}.

Arguments name the ways to take; without any, all are taken. SPAWN starts two ranks from here; with COMM_HOOK
what watches it sees gradients as it would on GPUs.
"""

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


class Samples(Dataset):
    """Samples of 8 numbers."""

    def __len__(self):
        return 72

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Net(nn.Module):
    """One with a BatchNorm, whose buffers DDP broadcasts."""

    def __init__(self, norm=False, unused=False):
        super().__init__()
        middle = [nn.BatchNorm1d(16)] if norm else []
        self.layers = nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 3))
        self.unused = nn.Linear(3, 3) if unused else None
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        found = self.layers(x)
        return self.unused(found) if self.unused is not None and self.calls % 3 == 0 else found


def batches(workers=0):
    data = Samples()
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=workers)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, loader=None, optimizer=None, to_none=True):
    optimizer = optimizer or sgd(model)
    for batch in batches() if loader is None else loader:
        optimizer.zero_grad(set_to_none=to_none)
        model(batch).float().square().mean().backward()
        optimizer.step()
    return model


@way
def before_any_loader():
    model = DDP(Net(norm=True))
    return train(train(model, [torch.randn(4, 8) for _ in range(4)]))


@way
def loader_first():
    loader = batches(workers=1)
    return train(DDP(Net(norm=True)), loader)


@way
def bucket_views():
    return train(DDP(Net(), gradient_as_bucket_view=True))


@way
def bucket_views_kept():
    """Gradients that lie in the bucket already are divided, not multiplied."""
    return train(DDP(Net(), gradient_as_bucket_view=True), to_none=False)


@way
def static_graph():
    return train(DDP(Net(norm=True), static_graph=True))


@way
def unused_parameters():
    return train(DDP(Net(unused=True), find_unused_parameters=True))


@way
def small_buckets():
    return train(DDP(Net(norm=True), bucket_cap_mb=0.0001))


@way
def own_hook():
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


@way
def own_hook_with_state():
    model = DDP(Net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


@way
def own_hook_of_a_class():
    class Half:
        def __init__(self):
            self.__name__ = self.__qualname__ = "half"

        def __call__(self, state, bucket):
            return default_hooks.fp16_compress_hook(state, bucket)

    model = DDP(Net())
    model.register_comm_hook(None, Half())
    return train(model)


@way
def own_hook_that_ddp_refuses():
    model = DDP(Net())
    try:
        model.register_comm_hook(None, functools.partial(default_hooks.fp16_compress_hook))
    except AttributeError as error:
        return train(model), str(error)
    return train(model), "taken"


@way
def own_hook_after_steps():
    model = train(DDP(Net()))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model)
    try:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    except RuntimeError as error:
        return model, str(error)
    return model, "twice"


@way
def builtin_hook():
    model = DDP(Net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return train(model)


@way
def builtin_hooks_after_steps():
    half, mean = train(DDP(Net())), train(DDP(Net()))
    half._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    mean._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return train(half), train(mean)


@way
def a_subclass():
    class Mine(DDP):
        def register_comm_hook(self, state, hook):
            return super().register_comm_hook(state, hook)

    return train(Mine(Net()))


@way
def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    try:
        return train(DDP(Net(), mixed_precision=half))
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:  # torch's own, without a GPU
        return Net(), str(error)[:40]


@way
def sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.EmbeddingBag(20, 8, sparse=True)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            return self.last(self.words((x * 7).long().abs() % 20))

    model = DDP(Words())
    return train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))


def uneven(model, **kwargs):
    from torch.distributed.algorithms.join import Join

    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = [torch.randn(8, generator=generator) for _ in range(12 + 8 * dist.get_rank())]
    with Join([model], **kwargs):
        return train(model, DataLoader(rows, batch_size=4))


@way
def joined():
    return uneven(DDP(Net()))


@way
def joined_after_steps():
    return uneven(train(DDP(Net())), divide_by_initial_world_size=False), uneven(train(DDP(Net())))


def accumulate(model):
    optimizer = sgd(model)
    for step, batch in enumerate(batches()):
        last = step % 3 == 2
        with contextlib.nullcontext() if last else model.no_sync():
            model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model


@way
def accumulation():
    return accumulate(DDP(Net(norm=True)))


@way
def accumulation_in_bucket_views():
    return accumulate(DDP(Net(), gradient_as_bucket_view=True))


@way
def two_models_in_turns():
    one, two = DDP(Net()), DDP(Net(norm=True))
    optimizers = sgd(one), sgd(two)
    for batch in batches():
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            (model(batch).square().mean() + (one(batch).detach() - 1).mean()).backward()
            optimizer.step()
    return one, two


@way
def compiled_around():
    return train(torch.compile(DDP(Net(norm=True)), backend="eager"))


@way
def compiled_inside():
    return train(DDP(torch.compile(Net(norm=True), backend="eager")))


@way
def compiled_collective():
    @torch.compile(backend="eager", fullgraph=True)
    def mean(x):
        dist.all_reduce(x)
        return x / dist.get_world_size()

    model = train(DDP(Net()))
    return model, [mean(batch).sum().item() for batch in batches()]


@way
def scaled():
    model = DDP(Net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model


@way
def second_derivatives():
    model = DDP(Net())
    optimizer = sgd(model)
    for batch in batches():
        optimizer.zero_grad()
        x = batch.requires_grad_()
        (slope,) = torch.autograd.grad(model.module(x).sum(), x, create_graph=True)
        (model(x).square().mean() + slope.square().mean()).backward()
        optimizer.step()
    return model


@way
def reentrant_checkpoints():
    from torch.utils.checkpoint import checkpoint

    class Saved(Net):
        def forward(self, x):
            return checkpoint(self.layers, x.requires_grad_(), use_reentrant=True)

    return train(DDP(Saved(), static_graph=True))


@way
def sharded_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Net())
    return train(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


@way
def averaged_by_hand():
    model = Net(norm=True)
    optimizer = sgd(model)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return model


@way
def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model)
    train(model)
    return [parameter.to_local() for parameter in model.parameters()]


@way
def saved_and_copied():
    model = train(DDP(Net(norm=True)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin, read = copy.deepcopy(model), torch.load(file, weights_only=False)
    return train(twin), train(read), len(model._comm_hooks)


def digest(found):
    """Of all tensors and values in what a way ends with."""
    total = hashlib.sha256()

    def add(value):
        if isinstance(value, nn.Module):
            add(list(value.state_dict().values()))
        elif isinstance(value, torch.Tensor):
            total.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    add(found)
    return total.hexdigest()


def main(rank=-1):
    torch.set_num_threads(1)
    for module in [found for name, found in sys.modules.items() if name.startswith("_feedtune_")]:
        if "COMM_HOOK" in os.environ and hasattr(module, "BUCKETS"):
            module.BUCKETS.everywhere = True
    if rank >= 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.FileStore(str(Path(os.environ["LOGS"]) / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[1:] or WAYS:
        torch.manual_seed(7)
        found[name] = [digest(WAYS[name]()), torch.rand(1).item()]
        print(f"{name}", flush=True)
    text = json.dumps(found)
    (Path(os.environ["LOGS"]) / f"ways.rank{dist.get_rank()}").write_text(text)
    # Ending while gloo's threads still hold what a broadcast was given aborts a process, watched or not.
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__" and "SPAWN" in os.environ:
    torch.multiprocessing.spawn(main, nprocs=2)
elif __name__ == "__main__":
    main()
