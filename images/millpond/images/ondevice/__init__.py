"""Programs that run on the device: provisioning, boot entries, SSH servers, self-test."""
