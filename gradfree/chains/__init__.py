"""What a chain is to engines, and what is put on a model to record one."""
