"""The ServerApp: rounds of one of Flower's strategies over fleets."""

import functools

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from millpond.flower import DiLoCo, serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rate, momentum = context.run_config["outer-rate"], context.run_config["outer-momentum"]
    diloco = functools.partial(DiLoCo, outer_rate=rate, outer_momentum=momentum)
    serve(grid, context, FedAvg if (rate, momentum) == (1.0, 0.0) else diloco)
