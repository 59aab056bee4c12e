# SPDX-License-Identifier: Apache-2.0
"""What 'millpond doctor' looks at: facts, gathered by edges, and pure checks that judge them."""
