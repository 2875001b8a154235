"""GradAlign inside Lightning, accelerate and transformers' Trainer, on the problem of ``algorithm1``.

``CASES`` are run by test_trainers.py in one process, and by this file, started by torchrun, on every rank. Each takes
three steps with momentum, an LR scheduler, clipping and a schedule of β, the last one after a restart from a
checkpoint, and returns where it ends and what else is to be looked at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import gradalign as ga
import sharded_at_work
from algorithm1 import BETA, GAMMA, LIMIT, LR, MOMENTUM, START, micro_batch
from gradalign.accelerate import prepare
from gradalign.lightning import Alignment
from gradalign.transformers import AlignedTrainer

WARMUP = ga.Warmup(value=BETA, rounds=2, start=BETA / 2)
BETAS = (0.5 * BETA, 0.75 * BETA, BETA)
Found = tuple[np.ndarray, dict[str, Any]]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def linear() -> nn.Linear:
    model = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    model.weight.data[:] = torch.tensor(START)
    return model


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((model(x) - y) ** 2).sum() / len(x)


def aligned(trained: nn.Module, **options: Any) -> ga.GradAlign:
    return ga.GradAlign(torch.optim.SGD(trained.parameters(), lr=LR, momentum=MOMENTUM), beta=WARMUP, **options)


def batches(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches, beginning with one of them and going round."""
    order = [(first + index) % count for index in range(count)]
    return [tuple(torch.tensor(values) for values in micro_batch(rank(), index)) for index in order]


def end_of(model: nn.Module) -> np.ndarray:
    return model.weight.detach().numpy().copy()


class Module(pl.LightningModule):
    """Least squares under Lightning, with the optimizer's work in ``by_hand``, or automatic when that is None."""

    def __init__(self, by_hand: Callable[[Module, Any, Tensor, Tensor], object] | None) -> None:
        super().__init__()
        self.net, self.by_hand = linear(), by_hand
        self.automatic_optimization = by_hand is None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.net, x, y)

    def training_step(self, batch, batch_idx):
        if self.by_hand is None:
            loss = self.loss(*batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss
        opt = self.optimizers()
        assert isinstance(opt, ga.GradAlign)
        self.by_hand(self, opt, *batch)
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self):
        opt = aligned(self)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": ExponentialLR(opt, GAMMA), "interval": "step"}}


def with_a_closure(module, opt, x, y):
    """The one call, with Lightning's clipping in between."""
    opt.align(module.loss, x, y, parts=2)
    module.clip_gradients(opt, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
    opt.step()


def with_verbs(module, opt, x, y):
    opt.zero_grad()
    parts = list(zip(x.tensor_split(2), y.tensor_split(2), strict=True))
    for part in parts:
        module.manual_backward(module.loss(*part))
        opt.collect(weight=len(part[1]))
    for part in parts:
        opt.displace()
        module.manual_backward(module.loss(*part))
    opt.clip_grad_norm_(LIMIT)
    opt.step()


def lightning(folder: Path, by_hand=None) -> Found:
    """Two steps, a checkpoint, and the third step in another trainer."""
    options = {"accelerator": "cpu", "devices": ranks(), "strategy": "ddp" if ranks() > 1 else "auto"}
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"enable_checkpointing": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    automatic = by_hand is None
    if automatic:
        options |= {"callbacks": [Alignment()], "accumulate_grad_batches": 2, "gradient_clip_val": LIMIT}
    count = 5 if automatic else 3
    file = folder / f"lightning-{getattr(by_hand, '__name__', 'automatic')}.ckpt"
    first = pl.Trainer(max_steps=2, max_epochs=1, **options)
    first.fit(Module(by_hand), DataLoader(batches(0, count), batch_size=None))
    first.save_checkpoint(file)
    module, second = Module(by_hand), pl.Trainer(max_steps=3, max_epochs=2, **options)
    second.fit(module, DataLoader(batches(count - 1, count)[:1], batch_size=None), ckpt_path=file)
    seen = {"counts": (first.global_step, second.global_step, second.optimizers[0].steps)}
    if automatic:
        seen["logged"] = float(second.callback_metrics["loss_step"])
        seen["logged over the epoch"] = float(first.callback_metrics["loss_epoch"])
    return end_of(module.net), seen


class Accelerated:
    """What a script with accelerate has, prepared."""

    def __init__(self, accumulate: int) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = linear()
        opt = aligned(model)
        made = prepare(self.accelerator, model, opt, ExponentialLR(opt, GAMMA))
        self.model, self.opt, self.schedule = made

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.model, x, y)

    def cut(self, index: int) -> None:
        """Take a step with one micro-batch, cut in two."""
        x, y = batches(index, 3)[0]
        self.opt.align(self.loss, x, y, parts=2)
        self.accelerator.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.opt.step()
        self.schedule.step()

    def accumulate(self, step: int) -> None:
        """Take a step with two micro-batches, or with the one that is left."""
        given = batches(2 * step, 5)[: 2 if step < 2 else 1]
        for number, (x, y) in enumerate(given):
            last = number == len(given) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)  # as accumulate() does at a loader's end
            with self.accelerator.no_sync(self.model):
                self.accelerator.backward(self.loss(x, y))
            self.opt.collect()
        for x, y in given:
            self.opt.displace()
            self.accelerator.backward(self.loss(x, y))
        self.opt.clip_grad_norm_(LIMIT)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()


def accelerated(folder: Path, accumulate: bool) -> Found:
    work = [Accelerated(2 if accumulate else 1)]
    seen = {"kinds": type(work[0].opt).__name__}
    for step in range(3):
        getattr(work[-1], "accumulate" if accumulate else "cut")(step)
        if step == 1:
            place = str(folder / f"accelerate-{accumulate}")
            work[-1].accelerator.save_state(place)
            work.append(Accelerated(2 if accumulate else 1))
            work[-1].accelerator.load_state(place)
    seen["steps"] = work[-1].opt.steps
    work[-1].opt.beta = 0.25
    seen["beta"] = work[-1].opt.optimizer.beta
    return end_of(work[-1].accelerator.unwrap_model(work[-1].model)), seen


class Regression(nn.Module):
    """A model as transformers has them: it returns its loss, over all labels that count."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.net = linear()
        self.accepts_loss_kwargs = counted

    def forward(self, x, labels=None, targets=None, num_items_in_batch=None):
        labels = targets if labels is None else labels
        errors = ((self.net(x) - labels) ** 2).sum(1)
        counts = labels[:, 0] != -100.0
        total = 0.5 * errors[counts].sum()
        return {"loss": total / (counts.sum() if num_items_in_batch is None else num_items_in_batch / 3)}


def transformers(folder: Path, counted: bool, labels: str = "labels") -> Found:
    """Micro-batches of 10 rows, of which as many count as the problem has; the others' labels are -100."""
    rows = []
    for index in range(5):
        for one in range(ranks()):  # the Trainer deals batches out to the ranks in turn
            x, y = micro_batch(one, index)
            empty = 10 - len(x)
            x, y = np.vstack([x, np.ones((empty, 3))]), np.vstack([y, np.full((empty, 3), -100.0)])
            rows += [{"x": torch.tensor(a), labels: torch.tensor(b)} for a, b in zip(x, y, strict=True)]
    seen: dict[str, Any] = {}
    for steps in (2, 3):
        args = TrainingArguments(
            output_dir=str(folder / f"transformers-{counted}-{labels}"),
            per_device_train_batch_size=10,
            gradient_accumulation_steps=2,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            max_grad_norm=LIMIT,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            logging_strategy="steps",
            logging_steps=1,
        )
        model = Regression(counted)
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        made = (sgd, ExponentialLR(sgd, GAMMA))
        trainer = AlignedTrainer(model, args, train_dataset=rows, optimizers=made, beta=WARMUP)
        trainer.train(resume_from_checkpoint=steps == 3)
        seen[f"steps of {steps}"] = trainer.state.global_step, trainer.optimizer.optimizer.steps
    seen["losses"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return end_of(model.net), seen


def compiled(folder: Path) -> Found:
    """torch.compile around the model, or around DistributedDataParallel."""
    inner = linear()
    model = torch.compile(DistributedDataParallel(inner) if ranks() > 1 else inner, backend="aot_eager", dynamic=True)
    opt = aligned(inner, model=model)
    schedule = ExponentialLR(opt, GAMMA)
    for index in range(3):
        x, y = batches(index, 3)[0]
        opt.align(partial(loss_of, model), x, y, parts=2)
        opt.clip_grad_norm_(LIMIT)
        opt.step()
        schedule.step()
        if index == 1:
            torch.save(opt.state_dict(), folder / f"compiled-{rank()}.pt")
            opt = aligned(inner, model=model)
            opt.load_state_dict(torch.load(folder / f"compiled-{rank()}.pt"))
            schedule.optimizer = opt
    return end_of(inner), {}


CASES: dict[str, Callable[[Path], Found]] = {
    "Lightning, manual, closure": lambda folder: lightning(folder, with_a_closure),
    "Lightning, manual, verbs": lambda folder: lightning(folder, with_verbs),
    "Lightning, automatic": lightning,
    "accelerate, closure": lambda folder: accelerated(folder, accumulate=False),
    "accelerate, verbs": lambda folder: accelerated(folder, accumulate=True),
    "torch.compile": compiled,
    "transformers": lambda folder: transformers(folder, counted=False),
    "transformers, counted": lambda folder: transformers(folder, counted=True),
    "transformers, without labels": lambda folder: transformers(folder, counted=True, labels="targets"),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {name: case(folder) for name, case in CASES.items()}
    found["sharded"] = sharded_at_work.report()
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the interpreter's end, where a thread of gloo that DDP keeps alive can abort the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
