# SPDX-License-Identifier: Apache-2.0
"""The host daemon, its fleet, federated coordination, and the command line."""
