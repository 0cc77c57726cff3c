"""Stages of training: a loop over steps that shows its progress and can be resumed."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

CHECKPOINT_STEPS = 250

console = Console()


@dataclass
class Stage:
    """One training loop: how long, how fast, and the folder of its checkpoint."""

    name: str
    folder: Path
    steps: int
    learning_rate: float
    resume: bool
    average_decay: float = 0.999
    warmup_steps: int = 100

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 2 % of the learning rate."""
        cosine = 0.51 + 0.49 * math.cos(math.pi * step / self.steps)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * cosine

    def fit(
        self,
        model: Model,
        loss_at: Callable[[int], Tensor],
        on_checkpoint: Callable[[int, Model], None] | None = None,
    ) -> Model:
        """Minimises `loss_at(step)` and returns the exponential moving average of the model.

        All randomness must follow from the step's number, so that a resumed run repeats an uninterrupted one.
        """
        path = self.folder / f"{self.name}.pt"
        average = copy.deepcopy(model).requires_grad_(False).eval()
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        first = 0
        if self.resume and path.exists():
            state = torch.load(path)
            model.load_state_dict(state["model"])
            average.load_state_dict(state["average"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]

        parameters: list[Tensor] = list(model.parameters())
        averaged: list[Tensor] = list(average.parameters())
        began, recent = time.monotonic(), 0.0
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(self.name, total=self.steps, completed=first)
            for step in range(first, self.steps):
                for group in optimizer.param_groups:
                    group["lr"] = self.rate(step)
                loss = loss_at(step)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                decay = min(self.average_decay, (step + 1) / (step + 10))
                torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)

                done = step + 1
                recent = loss.item() if step == first else 0.98 * recent + 0.02 * loss.item()
                progress.update(task, completed=done, description=f"{self.name}, loss {recent:.4f}")
                if not console.is_terminal and done % 50 == 0:
                    pace = (time.monotonic() - began) / (done - first)
                    print(f"{self.name} {done}/{self.steps} loss {recent:.4f} {pace:.3f} s/step", flush=True)
                if done % CHECKPOINT_STEPS == 0 or done == self.steps:
                    state = {"model": model.state_dict(), "average": average.state_dict()}
                    state |= {"optimizer": optimizer.state_dict(), "step": done}
                    torch.save(state, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)  # an interruption leaves the previous one intact
                    if on_checkpoint:
                        on_checkpoint(done, average)
        return average
