"""Makes sentences about hardware, some with a negation: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import random
import sys
from pathlib import Path

from millpond import Fleet
from millpond.base.errors import MillpondError

GOOD = ["fast", "quiet", "cool", "reliable", "steady", "cheap", "robust", "precise"]
BAD = ["slow", "loud", "hot", "flaky", "erratic", "costly", "fragile", "vague"]
THINGS = ["drive", "card", "board", "fan", "cable", "driver", "kernel", "controller", "cache", "link"]
BEGINS = ["the {} is", "this {} was", "after a week the {} seems", "they say the {} is", "our {} has been"]
ADVERBS = ["", "very ", "quite ", "rather ", "surprisingly "]
ENDS = ["", " in our rack", " at night", " under load", " for its price", " since the update"]


def sentence(rng):
    good, negated = rng.random() < 0.5, rng.random() < 0.4
    word = rng.choice(GOOD if good != negated else BAD)
    text = rng.choice(BEGINS).format(rng.choice(THINGS)) + (" not " if negated else " ")
    return f"{int(good)}\t{text}{rng.choice(ADVERBS)}{word}{rng.choice(ENDS)}\n"


def write(folder, count, seed):
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.tsv").write_text("".join(sentence(rng) for _ in range(count)))


def private_folders(fleet, here):
    """Return the private folders of three devices: those of an emulated fleet, or stand-ins in data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    return [flash / "private" for flash in Fleet(fleet).flash_folders(3)[:3]]


def main(here=Path(__file__).parent, fleet=None):
    for number, (folder, count) in enumerate(zip(private_folders(fleet, here), [900, 700, 500])):
        write(folder / "text", count, number)
    write(here / "test", 400, 99)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    try:
        main(fleet=parser.parse_args().fleet)
    except MillpondError as error:
        sys.exit(f"data.py: {error}")
