"""A Hugging Face Trainer that keeps its latest checkpoint only."""

import glob
import time

import torch
from small_data import SAVE_EVERY, STEPS, record
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import BertConfig, Trainer, TrainerCallback, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return {"input_ids": torch.arange(index % 7, index % 7 + 6), "labels": index % 2}


class ReadBack(TrainerCallback):
    def on_save(self, args, state, *_, **__):
        kept = glob.glob(args.output_dir + "/checkpoint-*")
        assert kept == [f"{args.output_dir}/checkpoint-{state.global_step}"], kept
        assert Classifier.from_pretrained(kept[0]).config.hidden_size == 16
        record(state.global_step, kept[0] + "/model.safetensors")


def main():
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        logging_steps=SAVE_EVERY // 2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = Classifier.from_config(config)
    Trainer(model, arguments, train_dataset=Sentences(), callbacks=[ReadBack()]).train()


main()
