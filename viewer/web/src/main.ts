import "./viewer.css";
import { type Overview, readOverview } from "./data/overview";
import { ServerSource } from "./data/server";
import { EmbeddedSource, existing, readRun, type Source } from "./data/source";
import type { RunData, Summary } from "./data/types";
import { byId, element } from "./dom";
import { showBandwidth } from "./panels/bandwidth";
import { type Leads, showBreakdown } from "./panels/breakdown";
import { showBudget } from "./panels/budget";
import { showCommunication } from "./panels/communication";
import { showComparison } from "./panels/comparison";
import { showCoverage } from "./panels/coverage";
import { showExpected } from "./panels/expected";
import { showExposed } from "./panels/exposed";
import { namedRanks, showFindings } from "./panels/findings";
import { showGroups } from "./panels/groups";
import { showHeader } from "./panels/header";
import { showHealth } from "./panels/health";
import { showHeatMap } from "./panels/heat_map";
import { showCriticalPath, showLostTime } from "./panels/lost_time";
import { showModules } from "./panels/modules";
import { showNetwork } from "./panels/network";
import { offerPerfetto } from "./panels/perfetto";
import { showPipeline } from "./panels/pipeline";
import { showProgress, showRuns, watchGrowth } from "./panels/served";
import { showSlowdown } from "./panels/slowdown";
import { showSteps } from "./panels/steps";
import { TimelinePanel } from "./panels/timeline";
import { showWhatIf } from "./panels/what_if";
import { Theme } from "./theme";
import { longestStall } from "./timeline/search";

declare global {
  interface Window {
    /** For tests: what is drawn, without reading pixels; null until the first step is there. */
    commtraceViewer: { visibleBoxes(): object[]; window(): { step: number; from: number; to: number } | null } | null;
  }
}

async function start(): Promise<void> {
  const theme = new Theme();
  byId("theme").addEventListener("click", () => theme.toggle());
  byId("close-help").addEventListener("click", () => byId<HTMLDialogElement>("help").close());
  listSections();
  const served = document.documentElement.dataset.server;
  if (served === undefined) await showRun(new EmbeddedSource(), theme);
  else {
    const token = new URLSearchParams(location.search).get("token") ?? "";
    const source = new ServerSource("data/", token, showProgress);
    if (served === "") await showRuns(source, token);
    else {
      watchGrowth(source);
      await showRun(source, theme);
    }
  }
}

async function showRun(source: Source, theme: Theme): Promise<void> {
  const run = await readRun(source);
  const panel = await showTimeline(source, run, theme);
  if (panel && source instanceof ServerSource) {
    offerPerfetto(source, run.title, () => panel.timeline.step?.number ?? null);
  }
  const summary = await existing(source.json<Summary>("summary.json"), "summary.json");
  panel?.mark(namedRanks(summary));
  const leads = leadsTo(panel, run);
  const overview = await readOverview(source);
  showSummary(summary, overview, theme, leads);
  showOverview(overview, run, theme, leads);
  await showHeatMap(summary, source, theme, async (rank, steps) => {
    const shown = steps && run.can_show.find((step) => step >= steps.first && step <= steps.last);
    if (shown !== undefined) await panel?.choose(shown);
    panel?.showRank(rank);
  });
  const showRank = (rank: number) => panel?.showRank(rank);
  await showNetwork(summary, source, theme, showRank);
  await showGroups(source, showRank);
  await showHealth(source, summary);
  await showExpected(source, summary, showRank);
  showWhatIf(source, summary, async (name) => panel?.showPredicted(name));
  await showSlowdown(source, showRank); // minutes of replays where ranks are very many
  if (await showComparison(source)) panel?.offerOther(); // another run may still be read when all else is there
}

/** A click scrolls there; the address keeps the view of the timeline. */
function listSections(): void {
  const headings = [...document.querySelectorAll<HTMLElement>("section h2")];
  byId("sections").append(
    ...headings.map((heading) => {
      const link = element("button", heading.textContent ?? "", "link");
      link.type = "button";
      const section = heading.closest("section")!;
      new MutationObserver(() => {
        link.hidden = section.hidden;
      }).observe(section, { attributeFilter: ["hidden"] });
      link.hidden = section.hidden;
      link.addEventListener("click", () => {
        heading.tabIndex = -1;
        heading.focus({ preventScroll: true });
        section.scrollIntoView();
      });
      return link;
    }),
  );
}

/** From a number to the spans behind it. */
function leadsTo(panel: TimelinePanel | null, run: RunData): Leads {
  const known = new Set(run.can_show);
  const show = async (step: number) => {
    await panel?.choose(step);
    byId("timeline").scrollIntoView({ block: "center" });
  };
  return {
    rank: (rank) => panel?.showRank(rank),
    step: (step) => (known.has(step) ? () => show(step) : null),
    stall: (role) => {
      const step = panel?.timeline.step;
      const box = step ? longestStall(step, role) : null;
      if (box) panel?.timeline.goTo(box);
      byId("timeline").scrollIntoView({ block: "center" });
    },
    find: (text) => {
      const input = byId<HTMLInputElement>("search");
      input.value = text;
      input.dispatchEvent(new Event("input"));
      byId("timeline").scrollIntoView({ block: "center" });
      input.focus({ preventScroll: true });
    },
  };
}

function showOverview(overview: Overview | null, run: RunData, theme: Theme, leads: Leads): void {
  for (const section of ["steps-section", "bandwidth-section"]) byId(section).hidden = !overview;
  if (!overview) return;
  showSteps(overview, run, theme, leads);
  showBandwidth(overview, theme, leads);
}

async function showTimeline(source: Source, run: RunData, theme: Theme): Promise<TimelinePanel | null> {
  if (!run.steps.length) {
    byId("timeline-body").replaceChildren(element("p", run.note, "empty"));
    return null;
  }
  const panel = new TimelinePanel(run, source, theme);
  await panel.start();
  const { timeline } = panel;
  window.commtraceViewer = {
    visibleBoxes: () => timeline.visibleBoxes(),
    window: () =>
      timeline.step ? { step: timeline.step.number, from: timeline.viewport.from, to: timeline.viewport.to } : null,
  };
  return panel;
}

function showSummary(summary: Summary, overview: Overview | null, theme: Theme, leads: Leads): void {
  showHeader(summary);
  showBudget(summary, leads.rank);
  showBreakdown(summary, overview, theme, leads);
  showExposed(summary, theme, leads);
  showCriticalPath(summary, theme, leads.rank);
  showLostTime(summary);
  showFindings(summary, leads.rank);
  showPipeline(summary, leads.rank);
  showCommunication(summary);
  showModules(summary, leads.rank);
  showCoverage(summary);
}

window.commtraceViewer = null;
const { dataset } = document.documentElement;
window.addEventListener("unhandledrejection", ({ reason }) => {
  const text = reason instanceof Error ? reason.message : String(reason);
  byId("failure").textContent = "ready" in dataset ? text : `This page could not be shown: ${text}`;
  byId("failure").hidden = false;
});
start().then(() => {
  dataset.ready = "";
});
