"""What the scenario `full` of `runs.py` must do, in plain torch: no verl, no padding, one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from tests.verl_backend import scripted


def _runs() -> ModuleType:
    """`runs.py` is a script with its own folder on the path."""
    import sys

    sys.modules.setdefault("scripted", scripted)
    spec = importlib.util.spec_from_file_location("verl_runs", Path(__file__).parent / "runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PlainTrainer:
    """Keeps the optimizer's state over steps; takes the weights of each step's start from the pushed folder."""

    def __init__(self, model: Path) -> None:
        self._runs = _runs()
        self._reference = scripted.load(model)
        self._model = scripted.load(model)
        options = self._runs.FULL_OPTIMIZER
        self._options = options
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
        )
        self._steps_with_update = 0
        self.learning_rate = 0.0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()

    def step(self, step: int, weights: Path) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the step's updates."""
        self._model.load_state_dict(scripted.load(weights).state_dict())
        rows = self._runs.full_batch(step, weights).rows
        useful = [row for row in rows if row.response_mask.any()]
        with torch.no_grad():
            old = {id(row): scripted.logprobs(self._model, row)[0] for row in useful}
            initial = {id(row): scripted.logprobs(self._reference, row)[0] for row in useful}
        mini_batches = sorted({row.mini_batch for row in useful})
        if mini_batches:
            self._steps_with_update += 1
            warmup = self._options.warmup_steps + 1
            self.learning_rate = self._options.learning_rate * min(1.0, self._steps_with_update / warmup)
        losses, norms = [], []
        for number in mini_batches:
            self._optimizer.zero_grad()
            loss = torch.zeros(())
            for row in useful:
                if row.mini_batch == number:
                    loss = loss + self._loss_of(row, old[id(row)], initial[id(row)])
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._options.grad_clip).item())
            losses.append(loss.item())
            for group in self._optimizer.param_groups:
                group["lr"] = self.learning_rate
            self._optimizer.step()
        return losses, norms

    def _loss_of(self, row: scripted.TrainingRow, old: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        config = self._runs.FULL_LOSS
        new, entropy = scripted.logprobs(self._model, row)
        a, ratio = row.advantage, torch.exp(new - old)
        token = torch.maximum(-a * ratio, -a * ratio.clamp(1 - config.clip_low, 1 + config.clip_high))
        if a < 0:
            token = token.clamp(max=-a * config.dual_clip)
        away = initial - new
        token = token - config.entropy_coefficient * entropy + config.kl_coefficient * (away.exp() - away - 1)
        return row.loss_weight * (token * torch.from_numpy(row.response_mask)).sum()
