"""The loop of steps (plan, submit, commit), the recovery after a fault, and the times of the steps."""
