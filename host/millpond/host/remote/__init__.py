# SPDX-License-Identifier: Apache-2.0
"""Work of commands on devices over SSH, and with the devices' volumes."""
