"""Makes a base model, and sentences, some with a negation: data/csd0, ... for the devices, test for the host.

The base is trained a little on other sentences, as a stand-in for a model that somebody has published.
"""

import argparse
import os
import random
import sys
from pathlib import Path
from zlib import crc32

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from millpond import Fleet
from millpond.base.errors import MillpondError

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError:
    sys.exit("data.py: transformers is not installed: pip install transformers")

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


def write_base(folder, steps=100):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, rng = BertForSequenceClassification(config), random.Random(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        lines = [sentence(rng).rstrip("\n").split("\t") for _ in range(32)]
        words = [torch.tensor([1 + crc32(w.encode()) % 1999 for w in text.split()]) for _, text in lines]
        words = pad_sequence(words, batch_first=True)
        labels = torch.tensor([int(label) for label, _ in lines])
        loss = cross_entropy(model(words, attention_mask=(words > 0).long()).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def private_folders(fleet, here):
    """Return the private folders of three devices: those of an emulated fleet, or stand-ins in data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    return [flash / "private" for flash in Fleet(fleet).flash_folders(3)[:3]]


def main(here=Path(__file__).parent, fleet=None):
    for number, (folder, count) in enumerate(zip(private_folders(fleet, here), [900, 700, 500])):
        write(folder / "text", count, number)
    write(here / "test", 400, 99)
    write_base(here / "base")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    try:
        main(fleet=parser.parse_args().fleet)
    except MillpondError as error:
        sys.exit(f"data.py: {error}")
