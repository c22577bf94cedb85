"""The versioned disk: log, tree, commits, branches, merge. Blocking; the only writer of the bucket."""
