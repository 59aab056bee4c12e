# SPDX-License-Identifier: Apache-2.0
"""Mini-epochs: slices of a data set that are repeated in a fast tier while the next one is fetched."""
