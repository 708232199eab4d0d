"""An accelerate training that goes on from its latest state, and keeps no other."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from small_data import SAVE_EVERY, STEPS, Numbers, endless, record
from torch.utils.data import DataLoader

STATES = "project/checkpoints"


def main():
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if os.path.isdir(STATES):
        (latest,) = os.listdir(STATES)
        accelerator.load_state(f"{STATES}/{latest}")
        project.iteration = int(latest.split("_")[1]) + 1
    for step, (x, y) in enumerate(endless(loader), 1):
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            folder = accelerator.save_state()
            assert os.listdir(STATES) == [os.path.basename(folder)]
            accelerator.load_state(folder)
            record(step, f"{folder}/model.safetensors")
        if step == STEPS:
            break
    accelerator.end_training()


main()
