"""REINFORCE leave-one-out: TRL's ``RLOOTrainer``."""

from __future__ import annotations

from typing import Any, ClassVar

from trl import RLOOConfig, RLOOTrainer
from trl.scripts.rloo import RLOOScriptArguments
from trl.trainer import rloo_trainer

from autotune.trainers.base import registry
from autotune.trainers.online import OnlineAdapter


class RlooAdapter(OnlineAdapter):
    """Builds ``RLOOTrainer`` on prompts."""

    name: ClassVar[str] = "rloo"

    def config_class(self) -> type:
        """Return ``RLOOConfig``."""
        return RLOOConfig  # type: ignore[no-any-return]

    def script_class(self) -> type:
        """Return ``RLOOScriptArguments``."""
        return RLOOScriptArguments  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``RLOOTrainer``."""
        with self.reference_in(rloo_trainer):
            return RLOOTrainer(**kwargs)


registry.register("rloo", RlooAdapter)
