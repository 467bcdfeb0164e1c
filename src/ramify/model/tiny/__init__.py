"""`tiny` as a directory: its tokenizer and sizes, the weights it starts from, and how trained ones are written."""
