# SPDX-License-Identifier: Apache-2.0
"""An NVMe/TCP target for stock Linux drivers: a file as block device, and the tunnel in vendor commands."""
