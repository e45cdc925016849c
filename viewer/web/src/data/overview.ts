// The resources of the overview (docs/viewer-data.md). A page from another program may lack them.

import type { Columns } from "./columns";
import type { Source } from "./source";

export interface OverviewTerms {
  begin_utc: string | null;
  median_ns: number | null;
  reasons: string[];
  events: string[];
  states: { kind: string; detail: string }[];
  roles: string[];
  operations: string[];
  uncertain_calls: number;
}

export interface Overview {
  terms: OverviewTerms;
  steps: Columns;
  events: Columns;
  blocks: Columns;
  bandwidth: Columns;
}

export async function readOverview(source: Source): Promise<Overview | null> {
  const names = ["steps", "events", "blocks", "bandwidth"];
  const [terms, steps, events, blocks, bandwidth] = await Promise.all([
    source.json<OverviewTerms>("overview.json"),
    ...names.map((name) => source.table(name)),
  ]);
  return terms && steps && events && blocks && bandwidth ? { terms, steps, events, blocks, bandwidth } : null;
}
