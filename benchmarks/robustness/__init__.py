"""What is lost when processes fail, and what grows when an engine runs for long?"""
