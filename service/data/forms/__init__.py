"""Forms of conversation in which a question is asked, as rows to train on."""
