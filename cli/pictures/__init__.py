"""Plans and runs as pictures: text timelines, traces, SVG figures, pages."""
