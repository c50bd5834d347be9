"""The paper's other tables made of a finished evaluation, its published numbers, and what a run says of its claims."""
