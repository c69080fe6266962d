"""What coded messages and state in bf16 cost in loss."""
