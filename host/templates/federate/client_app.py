"""The ClientApp of a fleet: the SuperNode's --node-config names the fleet and its job."""

import millpond.flower

app = millpond.flower.client()
