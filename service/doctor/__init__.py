"""What `hallutracer doctor` looks at: this machine, the installation, the model and its bundles.
Starts nothing."""
