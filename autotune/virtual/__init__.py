"""The virtual accelerator: shapes and lifetimes of a training run, no data and no card."""

from autotune.virtual.api import accelerator as accelerator
from autotune.virtual.trace import Trace as Trace
