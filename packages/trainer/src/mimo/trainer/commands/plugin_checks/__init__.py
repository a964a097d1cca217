"""What `mimo plugins --check` looks at, by kind of plugin."""
