"""What the commands of `offload` do. Each is imported when it is called, as some take seconds."""
