"""What writes committed files: dashboards, rules, reference pages, pictures. Not in the wheel."""
