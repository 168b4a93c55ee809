"""Group relative policy optimisation: TRL's ``GRPOTrainer``."""

from __future__ import annotations

from typing import Any, ClassVar

from trl import GRPOConfig, GRPOTrainer
from trl.scripts.grpo import GRPOScriptArguments
from trl.trainer import grpo_trainer

from autotune.trainers.base import registry
from autotune.trainers.online import OnlineAdapter


class GrpoAdapter(OnlineAdapter):
    """Builds ``GRPOTrainer`` on prompts."""

    name: ClassVar[str] = "grpo"

    def config_class(self) -> type:
        """Return ``GRPOConfig``."""
        return GRPOConfig  # type: ignore[no-any-return]

    def script_class(self) -> type:
        """Return ``GRPOScriptArguments``."""
        return GRPOScriptArguments  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``GRPOTrainer``."""
        with self.reference_in(grpo_trainer):
            return GRPOTrainer(**kwargs)


registry.register("grpo", GrpoAdapter)
