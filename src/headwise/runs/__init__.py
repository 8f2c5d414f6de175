"""One run in one folder: settings, files, what is finished, locks. No torch but in `moments`."""
