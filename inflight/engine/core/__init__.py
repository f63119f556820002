"""The loop of steps: plan, submit, commit; what follows a fault; when each step ran."""
