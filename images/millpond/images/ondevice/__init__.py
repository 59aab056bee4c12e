# SPDX-License-Identifier: Apache-2.0
"""Programs that run on the device: provisioning, boot entries, SSH servers, self-test."""
