"""What tests of several rooms build and start: bundles, keys, servers, answers.  One of each
kind."""
