"""GradAlign in the Trainer of transformers: the micro-batches that it accumulates are the parts. Takes seconds.

    python examples/trainer_transformers.py

A tiny BERT without any download learns to tell which of two words appears more often.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from gradalign.transformers import AlignedTrainer


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of 15 words out of two, each with the answer."""
    words = torch.randint(1, 3, (count, 15), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": ((row == 2).sum() > 7).long()} for row in words]


def main() -> None:
    """Train with AdamW, a warm-up and clipping, as the Trainer does by itself; print the test accuracy."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=3, max_position_embeddings=15, **size))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=8,  # eight parts, on every rank
            max_steps=60,
            learning_rate=3e-3,
            warmup_steps=6,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        labels = {"compute_metrics": lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())}}
        sets = {"train_dataset": sentences(2048, 0), "eval_dataset": sentences(512, 1)}
        trainer = AlignedTrainer(model, args, **sets, **labels, beta=3e-3)
        trainer.train()
        print(f"{trainer.state.global_step} steps: test accuracy {trainer.evaluate()['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
