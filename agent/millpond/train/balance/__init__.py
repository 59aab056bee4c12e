"""Who computes how much in a step: curves, equal-time batches, the controller that re-tunes them."""
