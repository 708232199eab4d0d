"""A Lightning training that goes on from its last checkpoint."""

import os

import pytorch_lightning as pl
import torch
from small_data import SAVE_EVERY, STEPS, Numbers, record
from torch.utils.data import DataLoader


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Checkpoints(pl.callbacks.ModelCheckpoint):
    """Reads back what was saved."""

    def on_train_batch_end(self, trainer, *args, **kwargs):
        super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.global_step % SAVE_EVERY == 0:
            step = trainer.global_step
            latest = f"epoch={trainer.current_epoch}-step={step}.ckpt"
            assert sorted(os.listdir("checkpoints")) == [latest, "last.ckpt"]
            assert torch.load("checkpoints/last.ckpt", weights_only=False)["global_step"] == step
            record(step, "checkpoints/last.ckpt")


def main():
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[Checkpoints(dirpath="checkpoints", save_last=True, every_n_train_steps=SAVE_EVERY)],
        enable_progress_bar=False,
        log_every_n_steps=SAVE_EVERY // 2,
    )
    trainer.fit(Classifier(), DataLoader(Numbers(), batch_size=2, shuffle=True), ckpt_path="last")


main()
