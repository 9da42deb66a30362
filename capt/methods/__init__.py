"""What CaPT is compared with, on the same two backbones: P-Tuning v2."""

from .prefix import PrefixModel

__all__ = ["PrefixModel"]
