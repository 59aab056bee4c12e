"""Makes sentences about hardware, some with a negation: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import random
import sys
import tomllib
from pathlib import Path

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


def places(fleet, here):
    """Return where the private data of three devices go: onto an emulated fleet, or into data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    listed = fleet / "fleet.toml"  # a device that was removed keeps its folder
    devices = tomllib.loads(listed.read_text()).get("device", []) if listed.is_file() else []
    flash = [fleet / "devices" / device["name"] / "flash" for device in devices]
    found = [folder / "private" for folder in flash if folder.is_dir()]
    if len(found) < 3:
        sys.exit(f"data.py: {fleet} has {len(found)} emulated devices; it needs three")
    return found[:3]


def main(here=Path(__file__).parent, fleet=None):
    for number, (place, count) in enumerate(zip(places(fleet, here), [900, 700, 500])):
        write(place / "text", count, number)
    write(here / "test", 400, 99)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    main(fleet=parser.parse_args().fleet)
