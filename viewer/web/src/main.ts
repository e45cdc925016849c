import "./viewer.css";
import { type Overview, readOverview } from "./data/overview";
import { ServerSource } from "./data/server";
import { EmbeddedSource, existing, readRun, type Source } from "./data/source";
import type { Finding, RunData, Summary } from "./data/types";
import { byId, element } from "./dom";
import { isInTimeline, isStop, ranksKept, stepOf, viewOf } from "./overview/evidence";
import { showBandwidth } from "./panels/bandwidth";
import { type Leads, showBreakdown } from "./panels/breakdown";
import { showBudget } from "./panels/budget";
import { showCommunication } from "./panels/communication";
import { showComparison } from "./panels/comparison";
import { showCoverage } from "./panels/coverage";
import { showExpected } from "./panels/expected";
import { showExposed } from "./panels/exposed";
import { showFigures, type Utilization } from "./panels/figures";
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
import { offerList, showProgress, showRuns, watchGrowth } from "./panels/served";
import { showSlowdown } from "./panels/slowdown";
import { showState } from "./panels/state";
import { showSteps } from "./panels/steps";
import { TimelinePanel } from "./panels/timeline";
import { showWhatIf } from "./panels/what_if";
import { Theme } from "./theme";
import { longestStall } from "./timeline/search";
import { FIRST, Views } from "./views";

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
  const served = document.documentElement.dataset.server;
  if (served === undefined) await showRun(new EmbeddedSource(), theme);
  else {
    const token = new URLSearchParams(location.search).get("token") ?? "";
    const source = new ServerSource("data/", token, showProgress);
    if (served === "") await showRuns(source, token);
    else {
      byId("title").textContent = document.title.replace("commtrace · ", ""); // until the run has been read
      watchGrowth(source);
      if ("several" in document.documentElement.dataset) offerList(token);
      await showRun(source, theme);
    }
  }
}

async function showRun(source: Source, theme: Theme): Promise<void> {
  const views = new Views();
  const run = await readRun(source);
  const panel = await showTimeline(source, run, theme);
  if (panel && source instanceof ServerSource) {
    offerPerfetto(source, run.title, () => panel.timeline.step?.number ?? null);
  }
  const summary = await existing(source.json<Summary>("summary.json"), "summary.json");
  const kept = ranksKept(summary.findings.filter(({ kind }) => kind !== "lost"));
  panel?.mark(namedRanks(summary), kept);
  const leads = leadsTo(panel, run, views);
  const overview = await readOverview(source);
  showSummary(summary, overview, theme, leads);
  showOverview(overview, run, theme, leads);
  showFigures(summary, overview, await source.json<Utilization>("utilization.json"), (view) => views.show(view));
  const evidence = evidenceIn(panel, durationsOf(run, overview), views);
  const findings = showState(summary, {
    show: (finding) => {
      findings.open(finding);
      return evidence.show(finding);
    },
    others: (finding) => evidence.others(finding),
    all: () => evidence.all(),
  });
  const first = summary.findings.find(isInTimeline);
  window.dispatchEvent(new Event("resize")); // figures and steps stand above the timeline now
  if (first && !panel?.isChosen) {
    findings.open(first);
    await evidence.lookAt(first);
  }
  await showHealth(source, summary);
  const stop = summary.findings.find(isStop);
  if (stop && !run.steps.length && !location.hash) await evidence.show(stop); // where each rank is, in place of steps that there are not
  const lookInHeatMap = await showHeatMap(summary, source, theme, async (rank, steps) => {
    const shown = steps && run.can_show.find((step) => step >= steps.first && step <= steps.last);
    views.show(FIRST);
    if (shown !== undefined) await panel?.choose(shown);
    panel?.showRanks([rank]);
  });
  evidence.heatMap = lookInHeatMap;
  await showNetwork(summary, source, theme, leads.rank);
  findings.refresh();
  await showGroups(source, leads.rank);
  await showExpected(source, summary, leads.rank);
  showWhatIf(
    source,
    summary,
    async (name) => panel?.showPredicted(name),
    () => views.show(FIRST),
  );
  await showSlowdown(source, leads.rank); // minutes of replays where ranks are very many
  if (await showComparison(source, () => views.show("comparison"))) panel?.offerOther(); // another run may still be read when all else is there
}

/** The steps that can be shown, and how long they took. */
function durationsOf(run: RunData, overview: Overview | null): Map<number, number> {
  const known = new Map(run.steps.map(({ step, duration_ns }) => [step, duration_ns]));
  const steps = overview?.steps;
  for (let row = 0; row < (steps?.length ?? 0); row++) known.set(steps!.of("step")[row]!, steps!.of("duration")[row]!);
  return new Map(run.can_show.map((step) => [step, known.get(step) ?? 0]));
}

/** From a finding to what it rests on. */
function evidenceIn(panel: TimelinePanel | null, steps: ReadonlyMap<number, number>, views: Views) {
  const lookAt = async (finding: Finding) => {
    const step = stepOf(finding, steps, panel?.shown ?? null);
    if (step !== null && step !== panel?.shown) await panel?.choose(step);
    panel?.showRanks(finding.ranks);
    byId("steps-answer").textContent =
      step === null
        ? "The timeline here has none of the steps of this finding: commtrace report RUN --steps has them."
        : "";
  };
  const numbersOn = (finding: Finding) => (views.has(viewOf(finding)) ? viewOf(finding) : "findings");
  return {
    lookAt,
    heatMap: null as ((finding: Finding) => void) | null,
    show: async (finding: Finding) => {
      const isShown = panel !== null && isInTimeline(finding);
      views.show(isShown ? FIRST : numbersOn(finding));
      if (!isShown) return;
      await lookAt(finding);
      byId("stage").scrollIntoView({ block: "nearest" });
    },
    others(finding: Finding): [string, () => void][] {
      const names = [...new Set([numbersOn(finding), ...(isInTimeline(finding) ? ["heat-map"] : []), "findings"])];
      return names
        .filter((name) => views.has(name))
        .map((name) => [views.nameOf(name), () => this.open(name, finding)]);
    },
    open(name: string, finding: Finding): void {
      if (name === "heat-map") this.heatMap?.(finding);
      views.show(name);
    },
    all: () => views.show("findings"),
  };
}

/** From a number to the spans behind it. */
function leadsTo(panel: TimelinePanel | null, run: RunData, views: Views): Leads {
  const known = new Set(run.can_show);
  const toTimeline = () => {
    views.show(FIRST);
    byId("timeline-section").scrollIntoView({ block: "nearest" });
  };
  return {
    rank: (rank) => {
      toTimeline();
      panel?.showRanks([rank]);
    },
    step: (step) => {
      if (!known.has(step)) return null;
      return async () => {
        toTimeline();
        await panel?.choose(step);
      };
    },
    stall: (role) => {
      toTimeline();
      const step = panel?.timeline.step;
      const box = step ? longestStall(step, role) : null;
      if (box) panel?.timeline.goTo(box);
    },
    find: (text) => {
      toTimeline();
      const input = byId<HTMLInputElement>("search");
      input.value = text;
      input.dispatchEvent(new Event("input"));
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
  showHeader(summary, overview);
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
