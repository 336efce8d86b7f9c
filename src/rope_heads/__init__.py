"""Position or Symbol? A literate reproduction of two papers on how attention heads use position."""

__version__ = "0.1.0"
