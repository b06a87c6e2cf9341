"""Handwritten digits of 8·8 pixels: the 1,797 images that come with scikit-learn, which nobody has to download.

Optical Recognition of Handwritten Digits, UCI (https://doi.org/10.24432/C50P49), its test part.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rondel.core.errors import ConfigError

SIDE = 8


@lru_cache(1)
def load_digit_images() -> tuple[np.ndarray, np.ndarray]:
    """(images [1797, 64] from -1, paper, to 1, ink; labels [1797] from 0 to 9). ConfigError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("the images of digits need the package scikit-learn: pip install 'rondel[digits]'") from error
    images, labels = load_digits(return_X_y=True)
    return images / 8 - 1, labels
