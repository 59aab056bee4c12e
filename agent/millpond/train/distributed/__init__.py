"""A script of the user's own, with batches tuned: process group, all-reduce, tuner."""
