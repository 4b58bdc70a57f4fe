"""From a model's configuration to the cache that an engine keeps for it. Offline; loaded only when asked for.

``layout_for`` reads a Hugging Face ``config.json`` (a dict, a path, or the name of a preset) and returns a
``CacheLayout``. What an engine really allocated is known only when it registers
(``CacheLayout.from_tensors``): this is for sizing, planning and tests. Formats and figures:
``docs/layouts.md``.
"""

from kvxfer.models.config import Target, load_config, model_name
from kvxfer.models.layouts import layout_for
from kvxfer.models.presets import PRESETS

__all__ = ["PRESETS", "Target", "layout_for", "load_config", "model_name"]
