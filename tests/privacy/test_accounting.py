# SPDX-License-Identifier: Apache-2.0
"""What noise costs, beside dp-accounting 0.6.0 (it needs attrs below 24, so it cannot be installed beside
ours).

The numbers are of ``RdpAccountant(orders).compose(ZCDpEvent(rho)).get_epsilon(delta)`` with the 200,001
orders ``1 + exp(linspace(-8, 14))``, and of its ``PLDAccountant`` for the Gaussian of the same rho, the
least epsilon that is true.
"""

import math

import pytest

from millpond.privacy.accounting import epsilon_of, rho_of, rho_of_sum, sigma_of_sum

OF_DP_ACCOUNTING = [  # rho, delta, epsilon by Renyi orders, epsilon by privacy loss
    (0.0001, 1e-05, 0.0450474621, 0.0399907),
    (0.0001, 1e-08, 0.0681270261, 0.0636786),
    (0.01, 1e-05, 0.545725548, 0.496975),
    (0.01, 1e-08, 0.752325886, 0.709018),
    (0.1, 1e-05, 1.91423883, 1.76006),
    (0.1, 1e-08, 2.53843221, 2.40158),
    (1.0, 1e-05, 7.0771967, 6.57297),
    (1.0, 1e-08, 8.97721845, 8.53378),
    (10.0, 1e-05, 30.1108573, 28.3735),
    (10.0, 1e-08, 35.9533186, 34.4514),
]


@pytest.mark.parametrize(("rho", "delta", "by_orders", "least"), OF_DP_ACCOUNTING)
def test_epsilon_is_that_of_dp_accounting(rho: float, delta: float, by_orders: float, least: float) -> None:
    found = epsilon_of(rho, delta)
    assert by_orders <= found <= 1.01 * by_orders
    assert found >= least


def test_costs_add_up() -> None:
    whole = epsilon_of(0.1, 1e-5)
    assert math.isclose(whole, epsilon_of(sum([0.001] * 100), 1e-5))
    assert whole < 100 * epsilon_of(0.001, 1e-5)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 3.0, 8.0, 50.0])
def test_a_budget_is_not_exceeded_and_used_up(epsilon: float) -> None:
    assert epsilon * (1 - 1e-9) <= epsilon_of(rho_of(epsilon, 1e-5), 1e-5) <= epsilon


def test_nothing_costs_nothing() -> None:
    assert epsilon_of(0.0, 1e-5) == 0.0


@pytest.mark.parametrize("values", [(-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (math.nan, 0.5)])
def test_what_is_no_cost(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="rho"):
        epsilon_of(*values)


def test_a_sum_of_shares_costs_as_much_as_its_noise() -> None:
    """With shares that are wide, a sum costs what one Gaussian of its variance does."""
    assert math.isclose(rho_of_sum(100, 50, 16, 1_000_000), 100**2 / (2 * 200**2), rel_tol=1e-5)


def test_narrow_shares_cost_more_than_one_gaussian() -> None:
    """Proposition 14 by hand: tau = 10 * exp(-2 * pi**2 * .36 / 2) = .2863 for two shares of .6."""
    tau = 10 * math.exp(-2 * math.pi**2 * 0.36 / 2)
    near = 1 / (math.sqrt(2) * 0.6)
    expected = min(near**2 / 2 + 4 * tau, (near + 2 * tau) ** 2 / 2)
    assert math.isclose(rho_of_sum(1, 0.6, 2, 4), expected, rel_tol=1e-5)


@pytest.mark.parametrize(("rho", "sensitivity", "terms"), [(0.1, 1, 1), (0.01, 1e6, 8), (2.0, 0.5, 20)])
def test_sigma_is_the_least_that_keeps_the_cost(rho: float, sensitivity: float, terms: int) -> None:
    sigma = sigma_of_sum(rho, sensitivity, terms, 1000)
    assert rho_of_sum(sensitivity, sigma, terms, 1000) <= rho
    assert sigma == 1 or rho_of_sum(sensitivity, sigma - 1, terms, 1000) > rho


def test_noise_that_nobody_can_draw() -> None:
    with pytest.raises(ValueError, match="sigma"):
        sigma_of_sum(1e-40, 1.0)
