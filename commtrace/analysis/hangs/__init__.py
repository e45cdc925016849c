"""Why a job stands still or ended: where communication stopped, who did not arrive, who failed first."""
