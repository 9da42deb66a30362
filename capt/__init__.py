"""CaPT: adapt a frozen language model with one vector a layer (arXiv 2510.16670).

>>> from capt import CaptConfig, get_capt_model
>>> model = get_capt_model(base, CaptConfig())
"""

from .config import CaptConfig
from .model import CaptModel, get_capt_model

__all__ = ["CaptConfig", "CaptModel", "get_capt_model"]
