# SPDX-License-Identifier: Apache-2.0
"""The transport of real controllers: vendor commands through the kernel's NVMe driver."""
