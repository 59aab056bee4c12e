# SPDX-License-Identifier: Apache-2.0
"""The tunnel's protocol in shared memory: layout, registers, queue pairs, link parameters, handshake."""
