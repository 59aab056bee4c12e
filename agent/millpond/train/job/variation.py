# SPDX-License-Identifier: Apache-2.0
"""Pure: how labelled images are varied: scaled to one size, cropped and flipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from millpond.base.keys import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """The sides of images in pixels, 0 for as they are. The place of a crop, and whether an image is flipped,
    follow from the job's seed, the epoch and the sample's place in its folder, whichever worker trains on it.
    A model is scored on the middle of images.

    FireCaffe (section 7.1) has 256 and 224, as has AlexNet (Krizhevsky et al. 2012, section 4.1).
    """

    resize: Annotated[
        int, Key('sides of the square to which pictures of "images" are scaled; 0: as they are', 0, 8192)
    ] = 0
    crop: Annotated[
        int, Key("sides of a part of each image, at random in training; 0: all of it", 0, 8192)
    ] = 0
    flip: Annotated[bool, Key("whether half of the images are mirrored in training")] = False
