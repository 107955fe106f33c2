"""What every folder stands on: settings, commands, output and files."""
