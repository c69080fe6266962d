"""What local steps save between hosts, and what they cost in loss."""
